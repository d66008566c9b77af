"""From a score to a weight: options on fragments, biases in shared memory, online softmax."""

"""What the oracle gives for the inputs of both passes: gradients by way of its own o and lse, which it then checks."""

from numba_flash import reference


def gradients(do, q, k, v, *, dlse=None, bias_grad=False, **options) -> tuple:
    """dq, dk, dv, and dbias if `bias_grad`."""
    return everything(do, q, k, v, dlse=dlse, bias_grad=bias_grad, **options)[2:]


def everything(do, q, k, v, *, dlse=None, bias_grad=False, **options) -> tuple:
    """o, lse and the gradients."""
    o, lse = reference.forward(q, k, v, return_lse=True, **options)
    return o, lse, *reference.backward(do, q, k, v, o, lse, dlse=dlse, bias_grad=bias_grad, **options)

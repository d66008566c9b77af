"""One hash over all sources of the package, for the keys of every kernel cache.

Numba's disk cache watches only the file a kernel is defined in, but a kernel inlines helpers from others (`mask`, `numeric`, ...). Keys
that contain this hash go stale as soon as any file of the package changes.
"""

import hashlib
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def source_fingerprint() -> str:
    """SHA-256 (hexadecimal) over the relative paths and the bytes of all ``.py`` files of the package, in sorted order."""
    root = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
        source = (root / name).read_bytes()
        digest.update(f"{name}\0{len(source)}\0".encode())
        digest.update(source)
    return digest.hexdigest()

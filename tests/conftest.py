"""Set before anything imports triton: without a GPU its kernels run in its interpreter."""

import os

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

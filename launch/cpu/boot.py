"""Starts SGLang's server on a machine without a GPU, from its published wheels. Its spawned children run this file again
(as `__mp_main__`), so what is declared at the top is declared in every process."""

import torch

# The wheel of torchvision is the CUDA build, whose operators do not load beside a CPU torch; SGLang imports torchvision,
# which registers shapes for operators that must then exist.
for name in ("nms", "qnms"):
    torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


class _Runtime:
    """Pinning host memory, which --enable-return-routed-experts asks of CUDA, does nothing."""

    def cudaHostRegister(self, *_):
        return 0

    cudaHostUnregister = cudaHostRegister


if not torch.cuda.is_available():
    torch.cuda.cudart = _Runtime

if __name__ == "__main__":
    import os
    import sys

    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)

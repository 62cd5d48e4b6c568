"""commsched.cuda: streams and kernels for CUDA gradients. Nothing is here yet.

This folder installs as ``commsched.cuda``. Seen from the repository root it would shadow NVIDIA's
namespace package ``cuda``, so under that name it steps aside.
"""

if __name__ == "cuda":
    from pkgutil import extend_path

    __path__ = extend_path(__path__, __name__)

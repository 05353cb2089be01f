"""CUDA C++ where Triton does not reach a bar, compiled when it is first used. Parts of ops of `triton/`; no backend."""

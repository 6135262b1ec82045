"""Triton kernels: the same operations on CUDA tensors.

Every module here but `variants` and `recording` imports Triton, which `import hotbed` must not:
whoever launches a kernel imports its module in the function that does. docs/internals/gpu.md says how kernels
are tested without a GPU.
"""

"""The specification of every number: the module's mathematics in eager PyTorch, with the kernels' rounding points.

Every matrix product accumulates in float64 and is rounded once to float32. Products of two E4M3 payloads have eight
significant bits, so these sums are exact for ordinary data: no bit depends on batching, neighbours or BLAS, and the
reference is also the oracle for kernels that accumulate in fp32. Row chunks and tile chunks bound the memory.
"""

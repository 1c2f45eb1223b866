"""Kernels for GPUs, written in Triton, behind custom ops of torch: tree attention, KV commits, few-row products.

`swarm.compute.kernels.support` says whether this machine can run them; nothing else here may be imported where it
cannot. Every op has an oracle in plain torch, which CPUs use and tests compare with. A row's result does not depend on
the rows beside it: docs/design/kernels.md.
"""

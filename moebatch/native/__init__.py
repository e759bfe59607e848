"""Our own kernels in C++ for the CPU, and whether this installation and processor have them.

Pointers in, pointers out: knows no models, requests or schedules. `kernels` is the face for tensors.
"""

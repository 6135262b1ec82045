"""Tables in the memory of a device: their rows, lookup, gradients and steps.

What is here launches kernels and never waits for them in a training step; what a step turned out to
be is looked at one step later (`deferred_errors`). `import hotbed` imports none of it: the modules need
Triton.
"""

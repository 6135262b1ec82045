"""Tables in the memory of a device: their rows, lookup, gradients and steps.

What is here launches kernels and never waits for them in a training step; what a step turned out to
be is looked at one step later (`notices`). `import hotbed` imports none of it: the modules need
Triton.
"""

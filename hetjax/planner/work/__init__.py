"""What layers compute, keep and send for one microbatch, counted from traces.

The work of all runs of layers stands in arrays; rates say what devices and links reach of their
figures.
"""

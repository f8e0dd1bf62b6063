"""Every private name of torch that the library uses, one function each, and the few of others than Lightning.

A function says why it is needed, since which torch the name is known, and what is done where it is missing. What a new
torch has dropped then fails in one test of tests/core/torch_private, which says in plain words what broke.

Nothing is imported here: a name is taken out of the module that defines it.
"""

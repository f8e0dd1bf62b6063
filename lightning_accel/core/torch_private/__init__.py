"""Every private name of torch that the library uses, one function each, and a few of other libraries.

A function says why it is needed, since which torch version the name exists, and what happens if it is missing. If a new
torch drops a name, one test of tests/core/torch_private fails and says what broke.

Nothing is imported here: import a name from the module that defines it.
"""

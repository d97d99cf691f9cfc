"""What moves arrays between stages, within a process and between processes.

Every wait for a peer has a deadline; a training state goes over to another plan through here, too,
and an array of a union comes to lie in another way.
"""

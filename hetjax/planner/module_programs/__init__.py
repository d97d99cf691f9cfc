"""Programs of modules: what unlike members compute and move, tensor by tensor, and what it takes."""

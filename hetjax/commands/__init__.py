"""What the commands are made of; `hetjax.train` and `hetjax.plan` only put it in order."""

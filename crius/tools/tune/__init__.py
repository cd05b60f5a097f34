"""``crius tune``: a model and conversations become a command of ``crius train``, answers before and after, and folders
that other libraries open."""

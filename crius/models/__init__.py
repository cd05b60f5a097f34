"""Models as plain single-device PyTorch, with torch-free facts about them beside. Knows no config section, no mesh."""

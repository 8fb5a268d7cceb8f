"""Real images of 32x32 pixels: clothes and photographs."""

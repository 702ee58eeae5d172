"""What a build says by itself: loops, stops, tool calls and languages of its answers."""

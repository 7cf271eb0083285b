"""From files people have to tokens with users: reading, cleaning, splitting, tokenising."""

"""How layers that keep a state run the trees of several sessions."""

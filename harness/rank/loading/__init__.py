"""How initial weights come to a rank without any rank holding all of them."""

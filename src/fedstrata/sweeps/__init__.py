"""Many runs from one file: named rows, a grid of keys, seeds; and one table of them all."""

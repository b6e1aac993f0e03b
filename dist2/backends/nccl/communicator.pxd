# Compiled, without types of C.

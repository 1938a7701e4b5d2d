"""Parts of torch that fxamp uses as they are, though torch may move them: everything else imports them from here.

There is one module for each package of torch, because each is slow to import.
"""

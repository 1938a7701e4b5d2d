"""Parts of torch that fxamp uses as they are, though torch may move them: everything else imports them from here.

One module for each package of torch, as each takes its time to import.
"""

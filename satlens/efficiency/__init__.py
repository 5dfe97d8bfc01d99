"""What an architecture costs: step time, tokens a second and peak memory of all six, side by side on one machine.

``child`` times one model in a process of its own, so that memory is that model's alone; ``alternate`` starts such
processes in turn, round after round, so that a slow moment of the machine hits all models alike.
"""

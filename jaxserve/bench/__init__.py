"""`jaxserve bench`: how fast an artifact is, alone and beside other systems.

offline   requests at once in the engine of this process, with the host's time a step
load      requests over HTTP to any OpenAI-compatible server, all at once or as a Poisson process
summary   what vLLM's benchmark reports of them, under its field names
peers     our server and other systems as processes that answer such requests
compare   several of them in turn, medians over rounds, and ratios
"""

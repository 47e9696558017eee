"""The HTTP server: one process for OpenAI's API, another for the engine.

    API process                                                            engine process
    uvicorn, FastAPI -> text threads (prompts to tokens) -> EngineClient  =>  EngineLoop -> Engine
    connection <- Outlet <- Format <- Choice (tokens to text) <- EngineClient <=  ids of a step
                                                               msgpack over zmq (wire.py)

Needs the `server` extra. Code outside this package does not import the extra's packages.
"""

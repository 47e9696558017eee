"""The HTTP server: an API process that speaks OpenAI's protocol, and the engine in another.

    API process                                                            engine process
    uvicorn, FastAPI -> text threads (prompts to tokens) -> EngineClient  =>  EngineLoop -> Engine
    connection <- Outlet <- Format <- Choice (tokens to text) <- EngineClient <=  ids of a step
                                                               msgpack over zmq (wire.py)

Needs the `server` extra; nothing outside this package imports what it brings.
"""

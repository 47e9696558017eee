"""The HTTP server: an API process that speaks OpenAI's protocol, and the engine in another.

    api process                                            engine process
    uvicorn, FastAPI -> text threads -> EngineClient  <=>  EngineLoop -> Frontend -> Engine
                                               msgspec over zmq (wire.py)

Needs the `server` extra; nothing outside this package imports what it brings.
"""

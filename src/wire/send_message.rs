//! placeholder (helper grpc)

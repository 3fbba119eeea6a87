//! A minimal OTLP collector that stores the spans it receives.

use std::sync::Arc;

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTraceServiceRequest, ExportTraceServiceResponse,
};
pub use opentelemetry_proto::tonic::trace::v1::Span;
use parking_lot::Mutex;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status};

/// Stores received spans.
#[derive(Debug, Clone, Default)]
pub struct Receiver {
    spans: Arc<Mutex<Vec<Span>>>,
    services: Arc<Mutex<Vec<String>>>,
}

#[tonic::async_trait]
impl TraceService for Receiver {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for resource in request.into_inner().resource_spans {
            self.services.lock().push(format!("{:?}", resource.resource));
            for scope in resource.scope_spans {
                self.spans.lock().extend(scope.spans);
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Receiver {
    /// Serves on its own port until the runtime ends.
    pub async fn start() -> (Self, u16) {
        let receiver = Self::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let server =
            tonic::transport::Server::builder().add_service(TraceServiceServer::new(receiver.clone()));
        #[expect(clippy::disallowed_methods, reason = "the test has no task group")]
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        (receiver, port)
    }

    /// Returns the spans named `name`, in order of arrival.
    pub fn named(&self, name: &str) -> Vec<Span> {
        self.spans.lock().iter().filter(|span| span.name == name).cloned().collect()
    }

    /// Returns the number of spans so far.
    pub fn count(&self) -> usize {
        self.spans.lock().len()
    }

    /// Returns the resources of the spans.
    pub fn services(&self) -> Vec<String> {
        self.services.lock().clone()
    }
}

/// Formats bytes in hex, as in a `traceparent`.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

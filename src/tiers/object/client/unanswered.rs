//! Whether an attempt of a request was not answered, which its caller may ask for by an extension of the request. Not here: the attempts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use object_store::PutOptions;

/// Says so once the request has ended. What was not answered may still be carried out, after later requests too.
#[derive(Debug, Clone, Default)]
pub struct Unanswered(Arc<AtomicBool>);

impl Unanswered {
    /// Options of a write that replaces what is there, of which this says it.
    #[must_use]
    pub fn options(&self) -> PutOptions {
        let mut options = PutOptions::default();
        // Of a type of std, which is the same for a double of the store that is built against another build of this crate.
        options.extensions.insert(Arc::clone(&self.0));
        options
    }

    /// What the extensions of a request want to know.
    #[must_use]
    pub fn of(extensions: &http::Extensions) -> Option<Self> {
        extensions.get::<Arc<AtomicBool>>().cloned().map(Self)
    }

    /// An attempt got no answer, or one by which the store does not know what it did.
    pub fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether there was one.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

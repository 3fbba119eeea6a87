//! Parts of several shares that a read takes together with its memory
//! ([`uniffle_io::ReadPermits`]): those of the devices that hold its data.
//!
//! Invariant: a read that waits for one share holds nothing of the others, so reads never wait for
//! each other in a circle.

use std::sync::Arc;

use futures::FutureExt as _;
use futures::future::{BoxFuture, select_all};
use smallvec::SmallVec;
use uniffle_io::{ReadPermit, ReadPermits};
use uniffle_wire::types::AppId;

use super::permit_pool::{PermitGuard, PermitPool};

/// Number of bytes in one unit of a share.
pub const UNIT_BYTES: usize = 4096;

/// Permits for a read of one application: the same number of bytes of each share, or all of a
/// smaller share.
#[derive(Debug)]
pub struct Turns {
    app: AppId,
    shares: SmallVec<[Arc<PermitPool>; 2]>,
    numbers: SmallVec<[usize; 2]>,
    count: usize,
}

impl Turns {
    /// Creates permits of `bytes` bytes of each share. A repeated share counts once.
    pub fn new<'a>(app: &AppId, shares: impl IntoIterator<Item = &'a Arc<PermitPool>>, bytes: usize) -> Self {
        let mut turns = Self {
            app: app.clone(),
            shares: SmallVec::new(),
            numbers: SmallVec::new(),
            count: bytes.div_ceil(UNIT_BYTES),
        };
        for share in shares {
            let number = Arc::as_ptr(share).addr();
            if !turns.numbers.contains(&number) {
                turns.numbers.push(number);
                turns.shares.push(Arc::clone(share));
            }
        }
        turns
    }

    /// Takes parts of all shares except that of `waited_for`, which is added. Returns the index of
    /// a full share as the error.
    fn try_others(&self, waited_for: Option<(usize, PermitGuard)>) -> Result<ReadPermit, usize> {
        let mut taken: SmallVec<[PermitGuard; 2]> = SmallVec::new();
        let known = waited_for.as_ref().map(|(at, _)| *at);
        taken.extend(waited_for.map(|(_, given)| given));
        for (at, share) in self.shares.iter().enumerate().filter(|(at, _)| known != Some(*at)) {
            taken.push(share.try_take(self.count).ok_or(at)?);
        }
        Ok(Box::new(taken))
    }
}

impl ReadPermits for Turns {
    fn try_take(&self) -> Option<ReadPermit> {
        self.try_others(None).ok()
    }

    fn full_share(&self) -> Option<usize> {
        let mut shares = self.shares.iter().zip(&self.numbers);
        shares.find(|(share, _)| !share.has_room(self.count)).map(|(_, number)| *number)
    }

    /// Holds nothing of the other shares while it waits for one of them.
    fn take(&self) -> BoxFuture<'_, ReadPermit> {
        let taking = async move {
            let mut waited_for = if self.shares.is_empty() { None } else { Some(0) };
            loop {
                let given = match waited_for {
                    Some(at) => Some((at, self.shares[at].take(&self.app, self.count).await)),
                    None => None,
                };
                match self.try_others(given) {
                    Ok(held) => return held,
                    Err(full) => waited_for = Some(full),
                }
            }
        };
        taking.boxed()
    }

    fn freed(&self) -> BoxFuture<'_, ()> {
        if self.shares.is_empty() {
            return std::future::pending().boxed();
        }
        select_all(self.shares.iter().map(|share| share.freed().boxed())).map(drop).boxed()
    }

    fn shares(&self) -> &[usize] {
        &self.numbers
    }
}

//! Heap profiles by jemalloc: call stacks of sampled live allocations (one per 512 KiB).
//!
//! jemalloc starts with `prof:true,prof_active:false`, so nothing is recorded until [`activate`].
//! Payload is not included: blocks are in the memory region, which is not on the heap.

use super::{Format, ProfileError};

/// State of heap profiling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Recording, since [`activate`] or since the start with suitable options.
    Active,
    /// Available, but not recording.
    Inactive,
}

/// Returns whether jemalloc's options request profiling from the start in a way that needs
/// [`activate`]: `prof:true` without `prof_active`. jemalloc's own default for `prof_active` is
/// true, but this build sets it to false.
pub fn is_requested(options: &str) -> bool {
    let is_set = |key: &str, value: &str| {
        let mut pairs = options.split(',').filter_map(|pair| pair.trim().split_once(':'));
        pairs.rfind(|(name, _)| *name == key).is_some_and(|(_, found)| value.is_empty() || found == value)
    };
    is_set("prof", "true") && !is_set("prof_active", "")
}

#[cfg(feature = "memory-prof")]
mod jemalloc {
    use std::sync::Arc;

    use std::time::SystemTime;

    use jemalloc_pprof::{JemallocProfCtl, PROF_CTL, StackProfile};
    use tokio::sync::{Mutex, OwnedMutexGuard};

    use super::super::job::{CountedStack, ProfileJob, RenderJob, SampleUnit, Samples};
    use super::super::maps::{AddressSet, Maps};
    use super::super::{ExclusivePermit, child, in_background};
    use super::{Format, ProfileError, State};

    fn control() -> Result<&'static Arc<Mutex<JemallocProfCtl>>, ProfileError> {
        let off = "heap profiling is off in this process: its jemalloc was started with prof:false";
        PROF_CTL.as_ref().ok_or(ProfileError::Unavailable(off))
    }

    /// Takes the lock without waiting. It is held for long only while a profile is taken.
    fn locked() -> Result<OwnedMutexGuard<JemallocProfCtl>, ProfileError> {
        Arc::clone(control()?).try_lock_owned().map_err(|_| ProfileError::Busy)
    }

    /// Returns the state of heap profiling.
    ///
    /// # Errors
    /// If heap profiling is not available, or a profile is being taken.
    pub fn state() -> Result<State, ProfileError> {
        Ok(if locked()?.activated() { State::Active } else { State::Inactive })
    }

    /// Starts recording if it is off.
    ///
    /// # Errors
    /// See [`state`].
    pub fn activate() -> Result<(), ProfileError> {
        let mut control = locked()?;
        if control.activated() {
            return Ok(());
        }
        control.activate().map_err(|error| ProfileError::Failed(error.to_string()))
    }

    /// Stops recording and discards recorded stacks. No effect if recording is off.
    ///
    /// # Errors
    /// See [`state`].
    pub fn deactivate() -> Result<(), ProfileError> {
        let mut control = locked()?;
        if !control.activated() {
            return Ok(());
        }
        control.deactivate().map_err(|error| ProfileError::Failed(error.to_string()))
    }

    /// Returns a profile of live allocations that were made since the activation.
    ///
    /// # Errors
    /// [`ProfileError::Inactive`] before [`activate`], [`ProfileError::Busy`] while another profile
    /// is being taken.
    pub async fn profile(permit: &ExclusivePermit, format: Format) -> Result<Vec<u8>, ProfileError> {
        let mut control = locked()?;
        if !control.activated() {
            return Err(ProfileError::Inactive);
        }
        in_background(permit, move || {
            let profile = control.dump_profile();
            drop(control);
            let profile = profile.map_err(|error| ProfileError::Failed(format!("{error:#}")))?;
            child::made(&job(profile, format))
        })
        .await
    }

    #[expect(clippy::cast_possible_truncation, reason = "bytes of a heap")]
    fn job(profile: StackProfile, format: Format) -> RenderJob {
        let mut addresses = AddressSet::default();
        let stacks = profile.stacks.into_iter().map(|(stack, _)| CountedStack {
            thread: None,
            frames: stack.addrs.iter().rev().map(|at| addresses.call_before(*at as u64)).collect(),
            found: stack.weight as i64,
        });
        let stacks = stacks.collect();
        let began = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let began_nanos = i64::try_from(began.as_nanos()).unwrap_or(i64::MAX);
        let samples = Samples { kind: SampleUnit::Heap, began_nanos, duration_nanos: 0, stacks };
        RenderJob {
            places: addresses.into_table(&Maps::of_this_process()),
            what: ProfileJob::Profile(samples, format),
        }
    }
}

#[cfg(feature = "memory-prof")]
pub use jemalloc::{activate, deactivate, profile, state};

#[cfg(not(feature = "memory-prof"))]
mod absent {
    use super::super::ExclusivePermit;
    use super::{Format, ProfileError, State};

    const ABSENT: ProfileError =
        ProfileError::Unavailable("this worker was built without heap profiles (cargo feature memory-prof)");

    /// Never available in this build.
    ///
    /// # Errors
    /// Always.
    pub fn state() -> Result<State, ProfileError> {
        Err(ABSENT)
    }

    /// Never available in this build.
    ///
    /// # Errors
    /// Always.
    pub fn activate() -> Result<(), ProfileError> {
        Err(ABSENT)
    }

    /// Never available in this build.
    ///
    /// # Errors
    /// Always.
    pub fn deactivate() -> Result<(), ProfileError> {
        Err(ABSENT)
    }

    /// Never available in this build.
    ///
    /// # Errors
    /// Always.
    pub async fn profile(_: &ExclusivePermit, _: Format) -> Result<Vec<u8>, ProfileError> {
        Err(ABSENT)
    }
}

#[cfg(not(feature = "memory-prof"))]
pub use absent::{activate, deactivate, profile, state};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prof_without_prof_active_requests_a_profile() {
        for wish in ["prof:true", "prof:true,prof_prefix:jeprof.out", "dirty_decay_ms:0, prof:true"] {
            assert!(is_requested(wish), "{wish}");
        }
        for other in [
            "",
            "prof:false",
            "prof:true,prof_active:false",
            "prof:true,prof_active:true",
            "prof:true,prof:false",
        ] {
            assert!(!is_requested(other), "{other}");
        }
    }
}

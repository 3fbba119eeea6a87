//! Classifies the content of a data directory before it is claimed. Pure: no I/O.
//!
//! Only an empty directory becomes a new one. A directory with our files but with a missing, empty
//! or damaged claim does not get another identity. Otherwise its blocks would be reported as lost,
//! and its statements about the metadata log would be missing. Such a start is refused, with an
//! error that says how certain its identity is.

use std::path::Path;

use uuid::Uuid;

use super::marker::{MARKER, is_of_other_version, lines_of, uuid_of};
use super::mounts::MOUNTS;
use crate::log::{Epoch, METADATA};

/// File in every directory written by 0.1.0, which had no metadata log.
const OLD_LIST: &str = "uniffle-worker.peers";
/// Directory that `mkfs` creates in a root. It is ignored.
const LOST_AND_FOUND: &str = "lost+found";

/// Content of a directory before it is claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store) enum Content {
    /// Empty or missing. A claim that was never written counts as empty.
    Nothing,
    /// Has our claim with this identity.
    Ours(Uuid),
    /// Has files, none of which only this program creates.
    Foreign,
    /// Has our files, but no usable claim.
    Unclaimed(Flaw),
    /// Written by 0.1.0, in a format that is no longer supported.
    Outdated,
    /// Written by a version with another format.
    OtherFormat,
}

impl Content {
    /// Returns the identity in our claim.
    pub(super) fn identity(self) -> Option<Uuid> {
        if let Self::Ours(uuid) = self { Some(uuid) } else { None }
    }
}

/// Reason why a claim is unusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::store::disk) enum Flaw {
    Missing,
    Empty,
    Damaged,
}

impl Flaw {
    fn as_str(self) -> &'static str {
        match self {
            Self::Missing => "is missing",
            Self::Empty => "is empty",
            Self::Damaged => "is damaged",
        }
    }
}

/// Classifies a directory from the names in it and its claim, if it exists.
pub(super) fn content_of(names: &[String], claim: Option<&[u8]>) -> Content {
    let is_other = |name: &&String| *name != MARKER && *name != LOST_AND_FOUND;
    let has_others = names.iter().any(|name| is_other(&name));
    let is_ours = |name: &String| [METADATA, MOUNTS].contains(&name.as_str());
    if names.iter().any(|name| name == OLD_LIST) {
        return Content::Outdated;
    }
    match claim {
        Some(claim) => match uuid_of(claim) {
            Some(uuid) => Content::Ours(uuid),
            // The claim is written and synced before any other file, so no data can exist.
            None if claim.is_empty() && !has_others => Content::Nothing,
            None if claim.is_empty() => Content::Unclaimed(Flaw::Empty),
            None if is_of_other_version(claim) => Content::OtherFormat,
            None => Content::Unclaimed(Flaw::Damaged),
        },
        None if names.iter().any(is_ours) => Content::Unclaimed(Flaw::Missing),
        None if has_others => Content::Foreign,
        None => Content::Nothing,
    }
}

/// Identity of a directory without a claim, as far as it can be determined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::store::disk) enum Identity {
    /// The identity is certain, with the reason.
    Certain(Uuid, &'static str),
    /// The identity is certain unless the directory was at another path before.
    ByPath(Uuid),
    /// The identity is one of several, listed with their former paths.
    OneOf(Vec<(Uuid, String)>),
    /// The identity is not recorded in the directory.
    Unknown,
}

impl Identity {
    /// Returns `uuid`, which a running worker uses, unless the content of the directory contradicts
    /// it.
    pub(super) fn or_in_use(self, uuid: Uuid) -> Self {
        match self {
            Self::Certain(another, _) if another != uuid => self,
            Self::Certain(..) | Self::ByPath(_) | Self::OneOf(_) | Self::Unknown => {
                Self::Certain(uuid, "the running worker uses it")
            }
        }
    }
}

/// Derives the identity from the newest epoch recorded in the directory. It is one of the voters of
/// that epoch, but none that may recover alone, because these were absent and did not record it. It
/// is none of `others`, whose claims are readable.
pub(super) fn identity(path: &str, epoch: Option<&Epoch>, others: &[Uuid]) -> Identity {
    let Some(epoch) = epoch else { return Identity::Unknown };
    let here = epoch.voters().into_iter().filter(|member| !member.may_recover_alone);
    let remaining: Vec<_> = here.filter(|member| !others.contains(&member.uuid())).collect();
    if let [only] = remaining[..] {
        return Identity::Certain(only.uuid(), "its list of data directories leaves no other identity");
    }
    let by_path: Vec<_> = remaining.iter().filter(|member| member.path == path).collect();
    match (by_path.as_slice(), remaining.is_empty()) {
        ([only], _) => Identity::ByPath(only.uuid()),
        (_, true) => Identity::Unknown,
        _ => Identity::OneOf(remaining.iter().map(|member| (member.uuid(), member.path.clone())).collect()),
    }
}

/// Returns a message with the flawed file, the identity, and what to do.
pub(in crate::store::disk) fn describe_flaw(root: &Path, flaw: Flaw, identity: &Identity) -> String {
    let file = root.join(MARKER);
    let what = format!("{} {}", file.display(), flaw.as_str());
    let otherwise = "restore the claim from a copy, or remove the directory from \
         localfile_store.data_paths; do not empty it";
    match identity {
        Identity::Certain(uuid, why) => {
            let command = command(&file, *uuid);
            format!("{what}; its identity is {uuid} for certain: {why}; to restore the claim: {command}")
        }
        Identity::ByPath(uuid) => {
            let command = command(&file, *uuid);
            format!(
                "{what}; its identity is {uuid} if it was at this path before, by its list of data \
                 directories; to restore the claim then: {command}"
            )
        }
        Identity::OneOf(candidates) => {
            let candidates: Vec<_> =
                candidates.iter().map(|(uuid, path)| format!("{uuid} (was {path})")).collect();
            format!("{what}; its identity is one of {}; {otherwise}", candidates.join(", "))
        }
        Identity::Unknown => format!("{what}, and the identity of the directory is unknown; {otherwise}"),
    }
}

/// Returns a shell command that writes a claim.
fn command(file: &Path, uuid: Uuid) -> String {
    let quoted = |text: &str| format!("'{}'", text.replace('\'', r"'\''"));
    let lines: Vec<String> = lines_of(uuid).iter().map(|line| quoted(line)).collect();
    format!(r"printf '%s\n' {} > {}", lines.join(" "), quoted(&file.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::super::marker::marker_of;
    use super::*;
    use crate::log::Member;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn uuid(number: u128) -> Uuid {
        Uuid::from_u128(number)
    }

    #[test]
    fn only_an_empty_directory_is_new() {
        let intact = marker_of(uuid(7)).into_bytes();
        for empty in [&[][..], &[LOST_AND_FOUND]] {
            assert_eq!(content_of(&names(empty), None), Content::Nothing);
            let claimed: Vec<&str> = empty.iter().copied().chain([MARKER]).collect();
            assert_eq!(
                content_of(&names(&claimed), Some(b"")),
                Content::Nothing,
                "an empty claim must count as no content"
            );
        }
        assert_eq!(content_of(&names(&["apps", "thesis"]), None), Content::Foreign);
        for ours in [METADATA, MOUNTS] {
            assert_eq!(content_of(&names(&["apps", ours]), None), Content::Unclaimed(Flaw::Missing));
        }
        for beside in ["apps", METADATA, "thesis"] {
            let names = names(&[beside, MARKER]);
            assert_eq!(content_of(&names, Some(b"")), Content::Unclaimed(Flaw::Empty));
            assert_eq!(content_of(&names, Some(&intact)), Content::Ours(uuid(7)));
            for cut in 1..intact.len() {
                let content = content_of(&names, Some(&intact[..cut]));
                assert_eq!(content, Content::Unclaimed(Flaw::Damaged), "{cut}");
            }
        }
        for claim in [None, Some(&intact[..]), Some(b"")] {
            assert_eq!(content_of(&names(&["apps", OLD_LIST, MARKER]), claim), Content::Outdated);
        }
        let newer = "uniffle-worker local store 2\nanything\n";
        let newer = format!("{newer}crc32 {:08x}\n", crc32fast::hash(newer.as_bytes()));
        assert_eq!(content_of(&names(&["apps", MARKER]), Some(newer.as_bytes())), Content::OtherFormat);
        assert_eq!(content_of(&names(&[MARKER]), Some(b"x")), Content::Unclaimed(Flaw::Damaged));
    }

    #[test]
    fn identity_is_derived_from_remains_or_path() {
        let mut members: Vec<Member> =
            [(1, "/a"), (2, "/b"), (3, "/c")].map(|(number, path)| Member::new(uuid(number), path)).into();
        let epoch = |members: &[Member]| Epoch { members: members.to_vec(), ..Epoch::default() };
        let of =
            |path: &str, members: &[Member], others: &[Uuid]| identity(path, Some(&epoch(members)), others);
        let by = |identity| match identity {
            Identity::Certain(uuid, _) => Some((uuid.as_u128(), true)),
            Identity::ByPath(uuid) => Some((uuid.as_u128(), false)),
            Identity::OneOf(_) | Identity::Unknown => None,
        };
        assert_eq!(
            by(of("/moved", &members[..1], &[])),
            Some((1, true)),
            "a single directory must be recognised after a move"
        );
        assert_eq!(by(of("/b", &members, &[])), Some((2, false)));
        assert_eq!(
            by(of("/b", &members, &[uuid(2), uuid(3)])),
            Some((1, true)),
            "the other members must identify a moved directory"
        );
        let remaining = vec![(uuid(1), "/a".to_owned()), (uuid(3), "/c".to_owned())];
        assert_eq!(of("/b", &members, &[uuid(2)]), Identity::OneOf(remaining));
        assert_eq!(
            of("/a", &members[..1], &[uuid(1)]),
            Identity::Unknown,
            "the directory is a copy of a present one"
        );
        assert_eq!(identity("/a", None, &[]), Identity::Unknown);
        // The directory was replaced by an empty one at its path, or was absent when the list was
        // written. It is neither of these voters.
        (members[0].votes, members[2].may_recover_alone) = (false, true);
        members.push(Member::new(uuid(4), "/a"));
        assert_eq!(by(of("/a", &members, &[uuid(2)])), Some((4, true)));
        assert_eq!(by(of("/a", &members, &[])), Some((4, false)));
    }

    #[test]
    fn refusal_names_file_and_remedy() {
        let root = Path::new("/it's");
        let text = describe_flaw(root, Flaw::Empty, &Identity::Certain(uuid(1), "so it is"));
        let start =
            format!("/it's/{MARKER} is empty; its identity is {} for certain: so it is; to restore", uuid(1));
        assert!(text.starts_with(&start), "{text}");
        assert!(text.ends_with(&format!(r"> '/it'\''s/{MARKER}'")), "{text}");
        let text = describe_flaw(root, Flaw::Missing, &Identity::OneOf(vec![(uuid(1), "/a".to_owned())]));
        assert!(text.contains("is missing; its identity is one of") && text.contains("(was /a)"), "{text}");
        let text = describe_flaw(root, Flaw::Damaged, &Identity::Unknown);
        assert!(text.contains("is damaged, and the identity") && text.contains("do not empty it"), "{text}");
    }
}

//! Snapshots of the block ids in memory.

use super::*;

#[test]
fn ids_of_all_blocks_are_known_before_any_release() {
    let memory = memory(8 * MIB);
    let buffer = buffer(&memory);
    let ids = || {
        let mut ids = buffer.ids();
        ids.sort_unstable();
        ids
    };
    assert!(ids().is_empty());
    put(&memory, &buffer, 1, 0, 10);
    put(&memory, &buffer, 2, 0, 10);
    let first = buffer.seal().unwrap();
    put(&memory, &buffer, 3, 0, 10);
    let second = buffer.seal().unwrap();
    put(&memory, &buffer, 4, 0, 10);
    assert_eq!(ids(), [1, 2, 3, 4]);
    // A reader whose cursor is in it starts at the head again and would find the first batch only.
    buffer.release(&second);
    assert_eq!(ids(), [1, 2, 4]);
    buffer.release(&first);
    assert_eq!(ids(), [4]);
    drop((first, second));
    buffer.release(&buffer.seal().unwrap());
    assert!(ids().is_empty());
}

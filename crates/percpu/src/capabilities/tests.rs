//! The parts of `capabilities` agree, and the error of `require_rseq` names its cause.

use std::io;

use super::*;

#[test]
fn parts_agree_with_each_other() {
    let all = capabilities();
    assert_eq!(all, capabilities(), "decided once");
    assert_eq!(require_rseq().is_ok(), all.sections == Sections::InUse, "{all}");
    if all.sections == Sections::InUse {
        assert_eq!(all.cpu_id.rseq(), RseqState::InUse);
        assert_eq!(all.fences, Strategy::Membarrier);
    }
    assert!(!all.mm_cid || all.node_id, "the kernel added node_id before mm_cid");
}

#[test]
fn a_field_is_there_if_the_area_reaches_its_end() {
    let sizes = [0, 20, 23, 24, 27, 28, 33];
    let node_id = [false, false, false, true, true, true, true];
    let mm_cid = [false, false, false, false, false, true, true];
    assert_eq!(sizes.map(|size| fields(size)[0]), node_id);
    assert_eq!(sizes.map(|size| fields(size)[1]), mm_cid);
}

#[test]
fn inv14_the_reason_is_said_loudly_and_as_an_errno() {
    let off = RseqUnavailable { reason: Sections::NoId(RseqState::NotRegistered) };
    assert_eq!(off.errno(), libc::EPERM);
    assert_eq!(
        off.to_string(),
        "rseq sections are off: rseq not registered by libc (switched off or refused)"
    );
    let failed = RseqUnavailable { reason: Sections::Misbehave("a closed gate let an add pass") };
    assert!(failed.to_string().contains("closed gate"));
    assert_eq!(io::Error::from(failed).raw_os_error(), Some(libc::ENOSYS));
}

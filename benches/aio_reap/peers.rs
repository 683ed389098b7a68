//! The runtimes that were compiled in.

use crate::reads::Rows;

/// The runtimes whose tasks wait for a ring.
#[cfg(feature = "runtimes")]
pub(crate) const TASKS_ON_RINGS: &[&str] = &["tokio-uring", "monoio", "compio"];
#[cfg(not(feature = "runtimes"))]
pub(crate) const TASKS_ON_RINGS: &[&str] = &[];

#[cfg(feature = "runtimes")]
pub(crate) fn rows() -> Rows {
    use crate::reads::Kind::Thread;
    use crate::runtimes;

    vec![
        ("tokio-uring", Thread(runtimes::tokio_uring)),
        ("monoio", Thread(runtimes::monoio)),
        ("compio", Thread(runtimes::compio)),
    ]
}

/// None.
#[cfg(not(feature = "runtimes"))]
pub(crate) fn rows() -> Rows {
    println!("# built without runtimes: --features runtimes adds tokio-uring, monoio and compio");
    Vec::new()
}

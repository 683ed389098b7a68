//! How long the server waits: for clients, for its own threads, and for disks. Each wait of the server that another
//! program could make endless has its bound here; those of a volume are in `volume`, because its store decides them.
//!
//! | waits for | bounded by | then |
//! |---|---|---|
//! | a client's handshake | [`HANDSHAKE`] | the connection is closed |
//! | a client that takes no replies, or stops inside a payload | [`STUCK`], if others need its memory | the connection is closed |
//! | a client's close after its last reply | [`LINGER`] | the connection is closed |
//! | a place within the limits of connections | [`PLACE`] | a half-open connection is closed, or this one |
//! | the context of a closed connection | [`CLOSING`] | the new connection is refused |
//! | replies at the end of the server | [`STOP`] | the connections are closed |
//! | the lock of an image of the command line | [`LOCK`] | the server does not start |
//! | a free buffer of the cache | [`BUFFER`] | the command writes or reads past the cache, or fails |
//! | a busy block | [`BLOCK`] | the command fails |
//! | a worker's figures | [`REPORT`] | the metrics are without its part, and without the counters of all workers |
//! | a client of the metrics | [`METRICS`] | its connection is closed |
//! | standard output and error | [`OUTPUT`] | the text is lost |
//!
//! A disk that does not answer is waited for without a bound: its requests can neither be taken back nor be
//! answered, so the end of the server waits for it, too.

use std::time::Duration;

/// How often a worker checks its deadlines while it has any, so a client may have this much more.
pub(crate) const TICK: Duration = Duration::from_millis(250);
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(10);
pub(crate) const STUCK: Duration = Duration::from_secs(3);
pub(crate) const LINGER: Duration = Duration::from_secs(1);
pub(crate) const STOP: Duration = Duration::from_secs(10);

/// Longer than a worker takes to handle the end of a client that has left, and longer than the client's last TCP
/// segment takes: another CPU may pass on the segment, so that the client's next connection overtakes it. Seen on two
/// CPUs: a worker that was late by 1.3 s beside 8 busy threads, and a segment by more than 250 ms beside 30.
pub(crate) const PLACE: Duration = Duration::from_secs(5);
/// The main thread waits for the worker of an evicted connection, and accepts no other connection meanwhile.
pub(crate) const CLOSING: Duration = Duration::from_millis(100);

/// The kernel keeps the lock of a killed server until its writes in flight have ended.
pub(crate) const LOCK: Duration = Duration::from_secs(1);
/// How long an image of a folder stays open and locked without a client: long enough that a client that connects
/// again finds its blocks in the cache.
pub(crate) const IDLE: Duration = Duration::from_secs(10);
/// The interval of the search for idle images.
pub(crate) const IDLE_CHECK: Duration = Duration::from_secs(1);

/// A wait while no block can be written back. A full disk reports it at once, and a slow one may take seconds.
pub(crate) const BUFFER: Duration = Duration::from_secs(2);
/// Longer than any operation of a disk.
pub(crate) const BLOCK: Duration = Duration::from_secs(60);

/// A worker that is late, perhaps because it opens an image, is left out.
pub(crate) const REPORT: Duration = Duration::from_secs(5);
/// For the whole request, and again for the whole response.
pub(crate) const METRICS: Duration = Duration::from_secs(5);
/// The end of the server waits for its log, and its start for standard output.
pub(crate) const OUTPUT: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 1 });

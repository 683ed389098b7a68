//! Requests above the engine's depth: which is answered before which.
//!
//! A burst of requests without payload is received in one go, so that all of it waits before the first
//! of it is answered. The server keeps one request in the kernel, so that replies come in the order in
//! which requests were admitted; how fast the machine is does not matter.

use libtest_mimic::Trial;

use crate::client::{Answer, Client, MIB, cmd, flag, header};
use crate::image;
use crate::lab::{Backend, Lab, Res, check, fail, per_backend};
use crate::server::{Launch, Server};

/// Large requests of a flood.
const LARGE: u64 = 200;
/// Small ones behind it.
const SMALL: u64 = 16;
/// Small ones are told by their cookies.
const IS_SMALL: u64 = 1 << 32;
/// Replies to large ones that may precede the last small one: the one that was in the kernel when the
/// small ones came, and what ageing lets pass, one in eight.
const AHEAD: u64 = 1 + SMALL.div_ceil(8);

pub(crate) fn trials() -> Vec<Trial> {
    let all = &Backend::ALL;
    let mut trials = per_backend(all, "small_reads_beside_large_writes", &[], beside_writes);
    trials.extend(per_backend(all, "small_reads_beside_large_reads", &[], beside_reads));
    trials.extend(per_backend(all, "flush_beside_large_writes", &[], flush_beside));
    trials.extend(per_backend(all, "large_writes_go_on_beside_small_reads", &[], not_starved));
    trials
}

fn start(lab: &Lab, backend: Backend) -> Res<Server> {
    let image = lab.path("a.img");
    image::with_parts(&image, 64 * MIB, 16, 43)?;
    let launch = Launch::new(lab, backend).image(&image);
    ["--workers", "1", "--depth", "1"].into_iter().fold(launch, Launch::arg).start()
}

/// Writes zeros to the first 32 MiB, a MiB at a time.
fn large_write(nr: u64) -> Vec<u8> {
    header(flag::NO_HOLE, cmd::WRITE_ZEROES, nr, (nr % 32) * MIB, MIB as u32)
}

fn large_read(nr: u64) -> Vec<u8> {
    header(0, cmd::READ, nr, (nr % 32) * MIB, 256 << 10)
}

fn small_read(nr: u64) -> Vec<u8> {
    header(0, cmd::READ, IS_SMALL | nr, 32 * MIB + nr * 4096, 4096)
}

/// Sends a burst, and takes the replies: their cookies in order. `payload` says how many bytes follow
/// one.
fn burst(
    client: &mut Client,
    requests: impl Iterator<Item = Vec<u8>>,
    payload: impl Fn(u64) -> usize,
) -> Res<Vec<u64>> {
    let requests: Vec<_> = requests.collect();
    client.send(&requests.concat())?;
    let mut order = Vec::new();
    for _ in 0..requests.len() {
        let (answer, cookie) = client.simple_reply()?;
        check!(answer == Answer(0), "request {cookie:#x}: error {}", answer.0);
        client.recv_vec(payload(cookie))?;
        order.push(cookie);
    }
    Ok(order)
}

/// How many large ones were answered before the last small one.
fn large_ahead(order: &[u64]) -> u64 {
    let last = order.iter().rposition(|cookie| cookie & IS_SMALL != 0).unwrap_or(0);
    order[..last].iter().filter(|&cookie| cookie & IS_SMALL == 0).count() as u64
}

/// Small reads that came behind a flood of large requests are answered before it.
fn overtake(lab: &Lab, backend: Backend, large: fn(u64) -> Vec<u8>, large_payload: usize) -> Res {
    let mut server = start(lab, backend)?;
    let mut client = server.client()?;
    let requests = (0..LARGE).map(large).chain((0..SMALL).map(small_read));
    let payload = |cookie| if cookie & IS_SMALL != 0 { 4096 } else { large_payload };
    let order = burst(&mut client, requests, payload)?;
    let ahead = large_ahead(&order);
    check!(ahead <= AHEAD, "{ahead} of {LARGE} large ones ahead, wanted {AHEAD}: {order:x?}");
    client.disconnect()?;
    server.still_serves()?;
    server.stop()
}

fn beside_writes(lab: &Lab, backend: Backend) -> Res {
    overtake(lab, backend, large_write, 0)
}

fn beside_reads(lab: &Lab, backend: Backend) -> Res {
    overtake(lab, backend, large_read, 256 << 10)
}

fn flush_beside(lab: &Lab, backend: Backend) -> Res {
    let server = start(lab, backend)?;
    let mut client = server.client()?;
    let flush = header(0, cmd::FLUSH, IS_SMALL, 0, 0);
    let order = burst(&mut client, (0..LARGE).map(large_write).chain([flush]), |_| 0)?;
    let ahead = large_ahead(&order);
    check!(ahead <= 1, "{ahead} of {LARGE} large ones before the flush: {order:x?}");
    server.stop()
}

/// A large write behind which 500 small reads wait is answered before most of them: it ages.
fn not_starved(lab: &Lab, backend: Backend) -> Res {
    let server = start(lab, backend)?;
    let mut client = server.client()?;
    let mut large = header(0, cmd::WRITE, 0, 0, 128 << 10);
    large.extend([0x77; 128 << 10]);
    let requests = [small_read(0), large].into_iter().chain((1..500).map(small_read));
    let order = burst(&mut client, requests, |cookie| usize::from(cookie != 0) * 4096)?;
    let Some(at) = order.iter().position(|&cookie| cookie == 0) else { fail!("no reply to it") };
    // Two classes wait: its turn comes within 16 places.
    check!(at <= 17, "overtaken by {at} reads");
    server.stop()
}

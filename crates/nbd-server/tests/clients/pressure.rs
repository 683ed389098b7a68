//! Clients that stall, vanish or crowd: bounded memory, and the others are served meanwhile.

use rustix::net::sockopt::set_socket_send_buffer_size_force;
use socket2::{Domain, Socket, Type};

use crate::lab::*;

pub(crate) fn trials() -> Vec<Trial> {
    let never_read = |lab: &Lab, backend| crowd(lab, backend, 8, greedy);
    let stalled = |lab: &Lab, backend| crowd(lab, backend, 16, stalled_writer);
    let silent = |lab: &Lab, backend| deadline_frees(lab, backend, false);
    let trickling = |lab: &Lab, backend| deadline_frees(lab, backend, true);
    let big = &[Need::LargeSocketBuffer];
    all([
        trial("pressure/handshake_deadline", &[], handshake_deadline),
        per_backend(ALL, "eight_clients_never_read", &[], never_read),
        per_backend(ALL, "stalled_writers_starve_nobody", &[], stalled),
        trial("pressure/sigterm_beside_a_hog", &[], sigterm_beside_a_hog),
        per_backend(ALL, "slow_reader_leaves_room", &[], slow_reader),
        per_backend(ALL, "deadline_frees_memory", &[], silent),
        per_backend(ALL, "deadline_frees_trickled_memory", &[], trickling),
        per_backend(BUFFERED, "thousand_zeroes", &[Need::NoZeroRange], zeroes_flood),
        per_backend(ALL, "client_vanishes_mid_request", &[], vanishes),
        per_backend(ALL, "payload_received_whole", big, payload_in_one_go),
        trial("pressure/half_open_clients_leave_room", &[], half_open),
        trial("pressure/an_address_has_half", &[], two_per_address),
    ])
}

/// What a server may hold for clients that do not take their replies.
const MEMORY_BOUND: u64 = 512 * MIB;

/// A server with one worker, so that every client shares it with the others.
fn start(lab: &Lab, backend: Backend) -> Res<Server> {
    Launch::new(lab, backend).parts(64 * MIB, 16, 41)?.with("--workers 1").start()
}

/// Sends 1,000 READs of 32 MiB; reads nothing. The server may stop taking them.
fn greedy(server: &Server) -> Res<Client> {
    let mut client = server.client()?;
    let one = |i| header(0, cmd::READ, i, (i % 2) * 32 * MIB, MAX_PAYLOAD);
    let bytes: Vec<u8> = (0..1000).flat_map(one).collect();
    client.stream.set_write_timeout(Some(Duration::from_millis(500)))?;
    // A partial send is what a server that stopped reading leads to.
    let _ = client.stream.write_all(&bytes);
    Ok(client)
}

/// For `time`, writes and reads as a well-behaved client; each round must be answered, and the server's
/// memory stay within its bound.
fn served_meanwhile(server: &Server, time: Duration) -> Res {
    let mut client = server.client()?;
    let start = Instant::now();
    let mut random = image::Random::new(42);
    while start.elapsed() < time {
        let (offset, data) = (4096 * random.below(1024), random.bytes(4096));
        client.write(offset, &data, 0)?.ok("a write meanwhile")?;
        check!(client.read(offset, 4096)? == Ok(data), "other bytes meanwhile");
        check!(client.read(32 * MIB, 1 << 17)?.is_ok(), "128 KiB meanwhile");
        let resident = server.memory("VmRSS")?;
        check!(resident < MEMORY_BOUND, "{} MiB resident", resident / MIB);
        thread::sleep(Duration::from_millis(20));
    }
    client.disconnect()
}

/// Announces a WRITE of 32 MiB, sends 1 MiB of it, and falls silent.
fn stalled_writer(server: &Server) -> Res<Client> {
    let mut client = server.client()?;
    client.stream.set_write_timeout(Some(Duration::from_millis(200)))?;
    client.request(0, cmd::WRITE, 32 * MIB, MAX_PAYLOAD)?;
    let _ = client.stream.write_all(&vec![0x44; MIB as usize]);
    Ok(client)
}

/// Such clients together do not use up what all connections share. Beside them another one reads and writes, also 2 MiB at
/// a time, as `qemu-img convert` does.
fn crowd(lab: &Lab, backend: Backend, count: usize, member: fn(&Server) -> Res<Client>) -> Res {
    let server = start(lab, backend)?;
    let crowd = (0..count).map(|_| member(&server)).collect::<Res<Vec<_>>>()?;
    served_meanwhile(&server, Duration::from_millis(1500))?;
    let mut client = server.client()?;
    for i in 0..8 {
        let offset = (16 + 2 * i) * MIB; // that nothing writes
        let wanted = image::bytes_at(&lab.path("a.img"), offset, 2 << 20)?;
        check!(client.read(offset, 2 << 20)? == Ok(wanted), "other bytes meanwhile");
    }
    let peak = server.memory("VmHWM")?;
    check!(peak < MEMORY_BOUND, "{} MiB at the peak", peak / MIB);
    drop(crowd);
    server.serves_to_the_end()
}

/// A client that takes no reply does not keep the server from ending, with 0.
fn sigterm_beside_a_hog(lab: &Lab) -> Res {
    let server = start(lab, Backend::Threads)?;
    let hog = greedy(&server)?;
    server.stop()?;
    drop(hog);
    Ok(())
}

/// Beside a client that takes 1,000 replies of 32 MiB slowly but steadily, so that no deadline
/// closes it, another one's READs of 1 MiB wait for no reply of the first.
fn slow_reader(lab: &Lab, backend: Backend) -> Res {
    let server = start(lab, backend)?;
    let mut slow = greedy(&server)?;
    let (stop, taken) = (AtomicBool::new(false), AtomicU64::new(0));
    // Ordering: Relaxed, all; they publish nothing.
    thread::scope(|scope| -> Res {
        let reader = scope.spawn(|| -> Res {
            while !stop.load(Ordering::Relaxed) {
                slow.recv_vec(MIB as usize / 4)?;
                taken.fetch_add(MIB / 4, Ordering::Relaxed);
                thread::sleep(Duration::from_millis(20));
            }
            Ok(())
        });
        thread::sleep(Duration::from_millis(300)); // the server takes all it will take
        let other = one_mib_reads(lab, &server, &taken);
        stop.store(true, Ordering::Relaxed);
        reader.join().expect("the reader does not panic")?;
        other
    })?;
    let taken = taken.into_inner();
    check!(taken >= 2 * MIB, "the slow reader took only {taken} bytes: it was not served");
    drop(slow);
    server.serves_to_the_end()
}

/// Eight READs of 1 MiB, verified. The slow reader is the clock, which is as late as the machine: no
/// READ takes it most of a reply, for which it takes 96 steps.
fn one_mib_reads(lab: &Lab, server: &Server, taken: &AtomicU64) -> Res {
    let mut client = server.client()?;
    for i in 0..8 {
        let wanted = image::bytes_at(&lab.path("a.img"), i * 3 * MIB, 1 << 20)?;
        let before = taken.load(Ordering::Relaxed);
        let bytes = client.read(i * 3 * MIB, 1 << 20)?;
        let meanwhile = taken.load(Ordering::Relaxed) - before;
        check!(bytes == Ok(wanted), "other bytes meanwhile");
        check!(meanwhile < 24 * MIB, "1 MiB beside {meanwhile} bytes of a slow reader");
        thread::sleep(Duration::from_millis(100));
    }
    client.disconnect()
}

/// Clients announce WRITEs of 32 MiB and send no byte of them, or one now and then; a READ of 32 MiB
/// waits until some of them are closed for it, and no longer.
fn deadline_frees(lab: &Lab, backend: Backend, trickle: bool) -> Res {
    let server = start(lab, backend)?;
    let wanted = image::bytes_at(&lab.path("a.img"), 0, MAX_PAYLOAD as usize)?;
    let mut other = server.client()?;
    let mut crowd = Vec::new();
    for _ in 0..8 {
        let mut client = server.client()?;
        client.request(0, cmd::WRITE, 32 * MIB, MAX_PAYLOAD)?;
        crowd.push(client);
    }
    thread::sleep(Duration::from_millis(300)); // their headers are understood
    let began = Instant::now();
    let done = AtomicBool::new(!trickle);
    let bytes = thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for client in &crowd {
                    let _ = (&client.stream).write(&[7]); // it may be closed
                }
                thread::sleep(Duration::from_millis(200));
            }
        });
        let result = other.read(0, MAX_PAYLOAD);
        done.store(true, Ordering::Relaxed);
        result
    });
    let took = began.elapsed();
    let bytes = bytes.map_err(|e| {
        let error = e.message().unwrap_or_default().to_string();
        format!("a READ of 32 MiB beside stalled WRITEs, after {took:?}: {error}")
    })?;
    check!(bytes == Ok(wanted), "other bytes meanwhile");
    // Otherwise the memory was not used up and nothing was shown.
    check!(took > Duration::from_secs(1), "it did not have to wait: {took:?}");
    server.logged("others wait for its memory")?;
    drop(crowd);
    server.serves_to_the_end()
}

/// Where zeros must be written, 1,000 requests for 1 MiB of them do not hold 1,000 MiB.
fn zeroes_flood(lab: &Lab, backend: Backend) -> Res {
    let shm = tempfile::Builder::new().prefix("nbd.").tempdir_in(need::SHM)?;
    let image = shm.path().join("a.img");
    image::sparse(&image, 64 * MIB)?;
    fs::write(&image, vec![0xee; 64 << 20])?;
    let server = Launch::new(lab, backend).image(&image).with("--workers 1").start()?;
    let mut client = server.client()?;
    let quiet = server.memory("VmRSS")?;
    let one = |i| header(flag::NO_HOLE, cmd::WRITE_ZEROES, i, (i % 63) * MIB, MIB as u32);
    let bytes: Vec<u8> = (0..1000).flat_map(one).collect();
    client.send(&bytes)?;
    let mut seen = vec![false; 1000];
    for _ in 0..1000 {
        let (answer, cookie) = client.simple_reply()?;
        answer.ok("zeroes")?;
        let Some(slot) = seen.get_mut(cookie as usize) else { fail!("cookie {cookie:#x}") };
        check!(!std::mem::replace(slot, true), "two replies to request {cookie}");
    }
    let peak = server.memory("VmHWM")?;
    let grown = peak.saturating_sub(quiet);
    check!(grown < 128 * MIB, "{} MiB more at the peak", grown / MIB);
    let zeroed = image::bytes_at(&image, 0, 63 << 20)?;
    check!(zeroed.iter().all(|&b| b == 0), "some of it is not zero");
    let rest = image::bytes_at(&image, 63 * MIB, 1 << 20)?;
    check!(rest.iter().all(|&b| b == 0xee), "zeros beyond what was asked for");
    server.serves_to_the_end()
}

/// Clients that end in the middle of a header, of a payload, and with replies on their way.
fn vanishes(lab: &Lab, backend: Backend) -> Res {
    let server = start(lab, backend)?;
    let mut other = server.client()?;
    let quiet = server.descriptors()?.len();
    for round in 0..20u64 {
        let mut client = server.client()?;
        let whole = header(0, cmd::WRITE, round, 16 * MIB, 65536);
        client.send(&whole[..1 + (round as usize * 7) % 27])?;
        drop(client);

        let mut client = server.client()?;
        client.send(&whole)?;
        client.send(&vec![0xbb; 1 + (round as usize * 3001) % 65535])?;
        drop(client);

        let mut client = server.client()?;
        let reads: Vec<u8> =
            (0..100).flat_map(|i| header(0, cmd::READ, i, i * 65536, 65536)).collect();
        client.send(&reads)?;
        drop(client);

        let data = vec![round as u8; 4096];
        other.write(0, &data, 0)?.ok("the other client's write")?;
        check!(other.read(0, 4096)? == Ok(data), "the other client's read");
    }
    // During the handshake as well.
    for len in [0, 3, 4, 10, 20] {
        let mut client = server.connect()?;
        let bytes = [&3u32.to_be_bytes()[..], b"IHAVEOPT", &[0, 0, 0, 7, 0, 0, 0, 99]].concat();
        client.send(&bytes[..len])?;
    }
    let are_released = || server.descriptors().is_ok_and(|open| open.len() <= quiet);
    eventually("the descriptors of vanished clients are closed", are_released)?;
    let untouched = other.read(16 * MIB, 65536)?;
    let wanted = image::bytes_at(&lab.path("a.img"), 16 * MIB, 65536)?;
    check!(untouched == Ok(wanted), "the server and its image differ");
    check!(!untouched.is_ok_and(|b| b.contains(&0xbb)), "half a payload was written");
    server.serves_to_the_end()
}

/// A client that says nothing, and one that trickles bytes, are closed 10 s after they came, and not
/// much earlier; one that finished its handshake may stay silent.
fn handshake_deadline(lab: &Lab) -> Res {
    let server = start(lab, Backend::Threads)?;
    let mut idle = server.client()?;
    let began = Instant::now();
    let mut silent = server.connect()?;
    let mut trickling = server.connect()?;
    trickling.read_greeting()?;
    trickling.send(&3u32.to_be_bytes())?;
    let option = [&b"IHAVEOPT"[..], &[0, 0, 0, 99, 0, 0, 0, 200], &[0; 200]].concat();
    trickling.stream.set_nonblocking(true)?;
    let took = thread::scope(|scope| {
        let silent = scope.spawn(|| silent.closed().is_ok().then(|| began.elapsed()));
        // A closed stream refuses bytes.
        let is_closed = option.iter().any(|&byte| {
            thread::sleep(Duration::from_millis(200));
            trickling.stream.write(&[byte]).is_err()
        });
        let trickling = is_closed.then(|| began.elapsed());
        [silent.join().expect("no panic"), trickling]
    });
    let is_late = |took: &Option<Duration>| took.is_some_and(|took| took > Duration::from_secs(8));
    check!(took.iter().all(is_late), "silent and trickling: closed after {took:?}");
    check!(idle.read(0, 4096)?.is_ok(), "a client past its handshake was closed too");
    server.logged("no handshake within 10 s")?;
    server.serves_to_the_end()
}

/// With `--max-connections 32`, 200 clients connect and do not negotiate, and do so again when they are
/// closed. Others negotiate beside them, and those that have negotiated stay.
fn half_open(lab: &Lab) -> Res {
    let server = Launch::threads(lab).sparse(4 * MIB)?.with("--max-connections 32").start()?;
    let mut early = server.client()?;
    let mut crowd = Vec::new();
    let mut late = Vec::new();
    for round in 0..4 {
        for _ in 0..50 {
            crowd.push(server.connect()?);
        }
        let client = server.client().map_err(|e| {
            format!(
                "round {round}: refused beside half-open clients: {}",
                e.message().unwrap_or("")
            )
        });
        late.push(client?);
    }
    check!(early.read(0, 4096)?.is_ok(), "a client that was there before was closed");
    for client in &mut late {
        check!(client.read(0, 4096)?.is_ok(), "a client past its handshake was closed");
    }
    server.logged("gives way")?;
    drop((crowd, early, late));
    server.stop()
}

/// Negotiates by TCP from an address of this machine.
fn connect_from(from: [u8; 4], server: &Server) -> Res<Client> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    socket.bind(&SocketAddr::from((from, 0)).into())?;
    socket.connect(&server.tcp()?.into())?;
    Client::over(OwnedFd::from(socket).into())?.opened("vol")
}

/// With `--max-connections 4` a third client of one address is refused, and one of another address is served.
fn two_per_address(lab: &Lab) -> Res {
    let launch = Launch::bare(lab).sparse(4 * MIB)?.with("--tcp 127.0.0.1:0");
    let server = launch.with("--max-connections 4").start()?;
    let connect = |from| connect_from(from, &server);
    let mut two = [connect([127, 0, 0, 1])?, connect([127, 0, 0, 1])?];
    check!(connect([127, 0, 0, 1]).is_err(), "a third client of one address was served");
    let mut other = connect([127, 0, 0, 2])?;
    for client in two.iter_mut().chain([&mut other]) {
        check!(client.read(0, 4096)?.is_ok(), "a client within the limit was closed");
    }
    drop(two);
    connect([127, 0, 0, 1])?;
    server.stop()
}

/// A large payload that is all there when the server looks is carried out, although nothing comes
/// behind it.
fn payload_in_one_go(lab: &Lab, backend: Backend) -> Res {
    let server = start(lab, backend)?;
    let mut client = server.client()?;
    set_socket_send_buffer_size_force(&client.stream, 32 << 20)?;
    for len in [64 << 10, MIB, 16 * MIB] {
        let data = vec![0x3c; len as usize];
        signal(server.pid(), libc::SIGSTOP);
        let cookie = client.request(0, cmd::WRITE, MIB, len as u32)?;
        let sent = client.send(&data);
        signal(server.pid(), libc::SIGCONT);
        sent?;
        client.answer(cookie)?.ok(&format!("a WRITE of {len} bytes"))?;
        check!(client.read(MIB, len as u32)? == Ok(data), "{len} bytes came back changed");
    }
    client.disconnect()?;
    server.stop()
}

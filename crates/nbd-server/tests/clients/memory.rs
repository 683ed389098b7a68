//! A server that may not have the memory that its clients ask for.

use crate::lab::*;

/// Starts the rest of the command line with 120 MiB of address space.
const LIMITED: [&str; 6] = [
    "env",
    "MALLOC_ARENA_MAX=1",
    "MALLOC_MMAP_THRESHOLD_=65536",
    "sh",
    "-c",
    "ulimit -v 122880; exec \"$0\" \"$@\"",
];

pub(crate) fn trials() -> Vec<Trial> {
    all([
        per_backend(ALL, "no_memory_is_an_answer", &[], no_memory),
        trial("memory/no_memory_for_a_handshake", &[], no_memory_for_a_handshake),
        trial("memory/clients_that_stand_still_lose_it", &[], stuck),
    ])
}

/// A server that may not have the memory for what is asked answers ENOMEM, to the requests for which it has
/// none, and goes on.
fn no_memory(lab: &Lab, backend: Backend) -> Res {
    const LEN: u32 = 4 << 20;
    const WRITE: u32 = 8 << 20;
    const CLIENTS: u32 = 20;
    let image = lab.path("a.img");
    image::with_parts(&image, 64 * MIB, 16, 43)?;
    let launch = Launch::new(lab, backend).image(&image).with("--workers 1");
    let mut server = launch.with("--cache 16M").through(LIMITED).start()?;
    let crowd = hogs(&server, CLIENTS, LEN)?;
    // All at the same time: a client that takes no reply for some seconds is closed.
    let taken = thread::scope(|scope| {
        let take = |mut client: Client| -> Res<(Client, u32)> {
            let refused = take_replies(&mut client, &image, LEN)?;
            Ok((client, refused))
        };
        let takers: Vec<_> =
            crowd.into_iter().map(|client| scope.spawn(move || take(client))).collect();
        let taken = takers.into_iter().map(|taker| taker.join().expect("it does not panic"));
        taken.collect::<Vec<Res<_>>>()
    });
    let (mut crowd, mut refused, mut closed) = (Vec::new(), 0, Vec::new());
    for taken in taken {
        match taken {
            Ok((client, count)) => {
                crowd.push(client);
                refused += count;
            }
            Err(error) => closed.push(error),
        }
    }
    check!(refused > 0, "there was memory for all READs: nothing is shown");
    server.still_serves()?;

    refused = 0;
    let mut cookies = Vec::new();
    for client in &mut crowd {
        cookies.push(client.request(0, cmd::WRITE, 32 * MIB, WRITE)?);
    }
    // The headers are understood, or all of them are when the worker comes to the first.
    thread::sleep(Duration::from_millis(300));
    for (client, cookie) in crowd.iter_mut().zip(cookies) {
        let mut write = || -> Res<u32> {
            client.send(&vec![0x77; WRITE as usize])?;
            let answer = client.answer(cookie)?;
            answer.any_of(&[0, err::ENOMEM], "a WRITE")?;
            check!(client.read(0, 4096)?.is_ok(), "out of step behind a WRITE");
            Ok(u32::from(answer.0 > 0))
        };
        match write() {
            Ok(count) => refused += count,
            Err(error) => closed.push(error),
        }
    }
    check!(
        (1..CLIENTS).contains(&refused),
        "{refused} of {CLIENTS} WRITEs were refused: nothing is shown"
    );
    // On a busy machine, clients are too slow for the server's deadline.
    let are_late = || {
        let late = server.log().matches("it stands still, and others wait").count();
        (late >= closed.len()).then_some(())
    };
    if let (None, Some(error)) = (wait_until(are_late), closed.pop()) {
        return Err(error);
    }
    drop(crowd);
    server.serves_to_the_end()
}

/// Clients that send 8 READs of `len` bytes and take no reply.
fn hogs(server: &Server, count: u32, len: u32) -> Res<Vec<Client>> {
    let mut hogs = (0..count).map(|_| server.client()).collect::<Res<Vec<_>>>()?;
    let one = |i| header(0, cmd::READ, i, i * u64::from(len), len);
    let reads: Vec<u8> = (0..8).flat_map(one).collect();
    hogs.iter_mut().try_for_each(|client| client.send(&reads))?;
    Ok(hogs)
}

/// Takes the replies of 8 READs of `len` bytes. Returns how many were refused for want of memory.
fn take_replies(client: &mut Client, image: &Path, len: u32) -> Res<u32> {
    let mut refused = 0;
    for _ in 0..8 {
        let (answer, cookie) = client.simple_reply()?;
        answer.any_of(&[0, err::ENOMEM], "a READ")?;
        refused += u32::from(answer.0 > 0);
        if answer.0 == 0 {
            let wanted = image::bytes_at(image, cookie * u64::from(len), len as usize)?;
            check!(client.recv_vec(len as usize)? == wanted, "other bytes than the image has");
        }
    }
    Ok(refused)
}

/// READs whose replies are not taken hold all the memory that the server may have. Clients that ask for long
/// replies in their handshakes then wait for memory, and get the replies once the others have left.
fn no_memory_for_a_handshake(lab: &Lab) -> Res {
    const TIMES: usize = 240; // replies of almost 1 MiB
    let image = lab.path("a.img");
    image::with_parts(&image, 64 * MIB, 16, 43)?;
    let long = "x".repeat(4000);
    let launch = Launch::threads(lab).image(&image).image_as(&long, &image);
    let launch = launch.with("--workers 1 --cache 16M");
    let server = launch.through(LIMITED).start()?;
    let crowds = [hogs(&server, 20, 4 << 20)?, hogs(&server, 20, 256 << 10)?];
    let mut option = b"IHAVEOPT".to_vec();
    option.extend([opt::LIST, 0].map(u32::to_be_bytes).concat());
    let mut crowd = Vec::new();
    for _ in 0..10 {
        let mut client = server.connect()?;
        client.read_greeting()?;
        client.send(&[vec![0, 0, 0, 3], option.repeat(TIMES)].concat())?;
        crowd.push(client);
    }
    drop(crowds);
    for client in &mut crowd {
        let reply = client.recv_vec(TIMES * long.len())?;
        check!(reply.starts_with(&0x3e889045565a9u64.to_be_bytes()), "no reply to LIST");
    }
    drop(crowd);
    server.serves_to_the_end()
}

/// Clients that take no replies hold all the memory that the server may have. They are closed when another
/// client's requests are refused for that.
fn stuck(lab: &Lab) -> Res {
    const LEN: u32 = 4 << 20;
    let launch = Launch::threads(lab).parts(64 * MIB, 16, 43)?.with("--workers 1");
    let mut server = launch.with("--cache 16M").through(LIMITED).start()?;
    // A new client each time: on a busy machine one may be too slow, and be closed as the others are. These may
    // have been closed for each other's requests before.
    let read = || server.client().and_then(|mut client| client.read(0, LEN));
    let (mut stuck, closed) = (Vec::new(), "others wait for its memory");
    eventually("a READ is refused", || match read() {
        Ok(Err(error)) => error == err::ENOMEM,
        // There is memory left: one more client holds it.
        Ok(Ok(_)) => {
            stuck.extend(hogs(&server, 1, LEN).unwrap_or_default());
            server.log().contains(closed)
        }
        Err(_) => server.log().contains(closed),
    })?;
    eventually("there is memory again", || read().is_ok_and(|read| read.is_ok()))?;
    server.logged(closed)?;
    drop(stuck);
    eventually("it serves", || server.still_serves().is_ok())?;
    server.stop()
}

//! Sockets that another process has bound, and hands to the server when it starts.

use std::net::UdpSocket;
use std::process;

use crate::lab::*;
use crate::process::stop_forked;

pub(crate) fn trials() -> Vec<Trial> {
    all([
        trial("activation/several_sockets", &[], several),
        trial("activation/a_client_that_came_first", &[], came_first),
        trial("activation/in_the_background", &[], in_background),
        trial("activation/sockets_of_another_process", &[], of_another),
        trial("activation/what_is_no_listening_socket", &[], no_listeners),
    ])
}

fn launch(lab: &Lab) -> Res<Launch<'_>> {
    Launch::bare(lab).with("--backend threads").sparse(MIB)
}

fn works(client: Res<Client>) -> Res {
    let mut client = client?.opened("vol")?;
    client.write(4096, &[3; 512], 0)?.ok("write")?;
    check!(client.read(4096, 512)? == Ok(vec![3; 512]), "other bytes came back");
    client.disconnect()
}

/// Two that were handed over, of both kinds, beside one of its own; the names of those it did not make stay.
fn several(lab: &Lab) -> Res {
    let (path, own) = (lab.path("given"), lab.path("s"));
    let unix = UnixListener::bind(&path)?;
    let tcp = TcpListener::bind("127.0.0.1:0")?;
    let address = tcp.local_addr()?;
    let sockets = vec![OwnedFd::from(unix), OwnedFd::from(tcp)];
    let server = launch(lab)?.on_socket("s").handed_over(sockets, None).start()?;
    let wanted = [
        format!("unix:{}", path.display()),
        format!("tcp:{address}"),
        format!("unix:{}", own.display()),
    ];
    check!(server.listeners == wanted, "it listens on {:?}", server.listeners);
    works(Client::connect(&path))?;
    works(Client::connect_tcp(address))?;
    works(Client::connect(&own))?;
    server.stop()?;
    check!(
        path.exists() && !own.exists(),
        "it removed a name that is not its own, or left its own"
    );
    Ok(())
}

/// The client connects before there is a server, which needs no socket of its own then.
fn came_first(lab: &Lab) -> Res {
    let path = lab.path("given");
    let unix = UnixListener::bind(&path)?;
    let client = Client::connect(&path);
    let server = launch(lab)?.handed_over(vec![unix.into()], None).start()?;
    works(client)?;
    server.stop()
}

/// The process in the background has the sockets of the one that was started.
fn in_background(lab: &Lab) -> Res {
    let (path, pid_file) = (lab.path("given"), lab.path("pid"));
    let unix = UnixListener::bind(&path)?;
    let server = launch(lab)?.handed_over(vec![unix.into()], None).arg("--fork");
    let (code, _, log) = server.arg("--pid-file").arg(&pid_file).run_to_end()?;
    check!(code == 0, "exit code {code}:\n{log}");
    let worked = works(Client::connect(&path));
    stop_forked(&pid_file)?;
    worked
}

/// What is in the environment for another process is not looked at.
fn of_another(lab: &Lab) -> Res {
    let path = lab.path("given");
    let unix = UnixListener::bind(&path)?;
    let sockets = vec![OwnedFd::from(unix)];
    let server = launch(lab)?.on_socket("s").handed_over(sockets, Some(process::id())).start()?;
    check!(server.listeners.len() == 1, "it listens on {:?}", server.listeners);
    works(server.connect())?;
    server.stop()?;
    // And is no socket to be reached by.
    let sockets = vec![OwnedFd::from(UnixListener::bind(lab.path("other"))?)];
    launch(lab)?.handed_over(sockets, Some(1)).refused(2, &["--socket"]).map(drop)
}

fn no_listeners(lab: &Lab) -> Res {
    let udp = UdpSocket::bind("127.0.0.1:0")?;
    let unbound = std::os::unix::net::UnixStream::pair()?.0;
    let file = fs::File::create(lab.path("f"))?;
    let bad = [OwnedFd::from(udp), OwnedFd::from(unbound), OwnedFd::from(file)];
    for (nr, bad) in bad.into_iter().enumerate() {
        let good = UnixListener::bind(lab.path(&format!("good-{nr}")))?;
        let sockets = vec![OwnedFd::from(good), bad];
        launch(lab)?.handed_over(sockets, None).refused(1, &["descriptor 4"])?;
    }
    // Fewer than were announced.
    let script = "LISTEN_PID=$$ LISTEN_FDS=200 exec \"$0\" \"$@\"";
    launch(lab)?.through(["sh", "-c", script]).refused(1, &["LISTEN_FDS=200"]).map(drop)
}

//! The text of `--help` around the options.

/// What the server is, before the options.
pub(crate) const ABOUT: &str = "\
Serves disk images over the network block device protocol (NBD, fixed
newstyle) to QEMU, the kernel's client, and everything that uses libnbd.

Each --image is an export by its own name, and the first one is also what a
client gets that asks for none. Clients connect to a Unix socket (--socket),
by TCP (--tcp), to sockets that were handed over, or to all of these. An image
is a raw one: a file or a block device, whose bytes are those of the export; or
an export of another NBD server, by its URI.

Without --image and --export-dir it runs a demonstration: it makes a temporary
image, serves it, drives it with a built-in client, verifies every byte and
prints what it measured.";

/// The rest, after the options.
pub(crate) const MORE: &str = "\
DURABILITY
  What a client has written is safe from a crash of the machine once a FLUSH
  after it, or its own FUA flag, was answered, even if the server is killed
  afterwards. A write of up to 16K that was answered and not flushed stays in
  the server's memory for about 5 seconds. If the server is killed (SIGKILL, out
  of memory) it is lost, unlike with the page cache of qemu-nbd; --cache 0
  avoids that. An fdatasync that failed makes an image's later FLUSHes fail,
  for what was lost is not known. At the end all images are made durable.

OTHER SERVERS
  If the connection to another server is lost, requests wait up to --reconnect
  seconds for a new one, and what the other server had answered and not flushed
  is sent to it again. A FLUSH that fails meanwhile makes all later ones fail.

SECURITY
  By default only the user that starts the server, and root, can connect to its
  Unix sockets (mode 0600).
  QEMU under libvirt runs as another user: --socket-group and --socket-mode 660
  admit a group. Every program that reaches a TCP port can read and write every
  image, unless TLS is required: --tls require --tls-certificates DIR, where DIR
  has server-cert.pem and server-key.pem, ca-cert.pem of the authority that
  signs the certificates of clients, and ca-crl.pem if it has revoked some (the
  names of QEMU and nbdkit). With --tls-no-verify-peer the connection is
  encrypted, and every client is admitted. An address other than loopback wants
  --tls require or --insecure. With --tls on clients choose, and an attacker on
  the way can choose for them. The server must be built with --features tls.

CONNECTIONS
  A client has 10 seconds for its handshake. A connection that has finished it
  is never closed to make room for another. A connection that has not may be:
  if --max-connections or --max-per-peer is reached, a new connection takes the
  place of the oldest unfinished one. One peer has at most a quarter of
  --max-connections unfinished (16 if that is more); beyond that, its oldest
  unfinished one is closed. A peer is a user on Unix sockets, and an address on
  TCP (a /64 network of IPv6). By default an address may have half of
  --max-connections, and a user all of them; set --max-per-peer for a socket
  that several users can open, or where clients share one address.

WORKERS
  A new connection goes to the worker thread with the fewest connections, and
  stays there. A worker that had more than a quarter second of work in the last
  seconds counts as one with four more.

LOCKS
  An image that another program has locked is not served, nor by two servers
  at once, unless both only read it. QEMU's programs respect the lock, and so
  are kept from writing to an image behind the server's back.

SOCKETS THAT ARE HANDED OVER
  As systemd and systemd-socket-activate do: LISTEN_PID is the server's
  process id, and LISTEN_FDS the number of listening stream sockets, from
  descriptor 3 on. Neither --socket nor --tcp is needed then. A TCP socket that
  other machines reach wants --tls require or --insecure, as --tcp does.

SIGNALS
  SIGTERM, SIGINT  answers what it was asked, for at most 10 seconds, makes the images durable,
                   ends; with a disk that hangs, once the disk answers
  SIGHUP           exports whose files have grown grow too, in blocks of 4096 bytes, except those
                   with size=; clients that connect from then on see the new size
  SIGUSR1          prints sessions and figures to standard error, as --stats does

ENVIRONMENT
  OFFLOCK_LOG      what is logged, in the syntax of Rust's tracing-subscriber:
                   warn, debug, off; info if not set

EXIT STATUS
  0  it was told to end, and every image is durable; with --fork, the server listens
  N  with --run, that of the command (128 + N if signal N ended it), if every image is durable
  1  it could not start, or could not make an image durable; standard error says why
  2  the command line is wrong

EXAMPLES
  An image of 10 GiB, made if it is not there, for programs on this machine:
      nbd_server --image disk.img --size 10G --socket /tmp/disk.sock
  To see it from there:
      nbdinfo 'nbd+unix:///disk.img?socket=/tmp/disk.sock'
  As a disk of a virtual machine:
      qemu-system-x86_64 -drive 'file=nbd+unix:///disk.img?socket=/tmp/disk.sock,format=raw,if=virtio'
  As a disk of this machine (root; needs the kernel's nbd module):
      nbd-client -unix /tmp/disk.sock -N disk.img /dev/nbd0
  Two images for reading only, by name, on port 10809:
      nbd_server --image root=/srv/root.img --image usr=/srv/usr.img --read-only --tcp 10809
  The second GiB of a disk as an export of its own, beside the disk for reading only:
      nbd_server --image part=disk.img,offset=1G,size=1G --image disk.img,readonly --socket /tmp/disk.sock
  Every image of a folder, also those that come later:
      nbd_server --export-dir /srv/images --socket /tmp/disk.sock
  A script that works on an image, and ends the server when it ends:
      nbd_server --image disk.img --run 'qemu-img convert -O qcow2 \"$uri\" disk.qcow2'
  In the background, for a virtual machine of libvirt, until its disk is closed:
      nbd_server --image disk.img --socket /run/disk.sock --socket-group libvirt-qemu --socket-mode 660 \\
          --fork --pid-file /run/disk.pid --exit-with-last
  Started by the first client:
      systemd-socket-activate -l /tmp/disk.sock nbd_server --image disk.img
  What it does, for people and for Prometheus:
      kill -USR1 $(pidof nbd_server)
      curl --unix-socket /tmp/metrics.sock http://localhost/metrics   (with --metrics /tmp/metrics.sock)";

//! Two adapters that reach each other through a tunnel over the loopback interface, in one process.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use pvrdma_dev::testing::SendWr;
use pvrdma_ether_link::{
    tls::{TlsConfig, TlsFiles, TlsLink, TlsRole},
    vxlan::{VxlanConfig, VxlanLink},
};
use pvrdma_link::{Link, MonotonicClock};
use pvrdma_rxe::{PortRules, Rxe, RxeConfig};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use super::recorded::Station;
use crate::bench::figure::Figure;

const WRITE: usize = 1 << 20;
/// Writes in flight, and in a round.
const DEPTH: u32 = 4;
const WRITES: u32 = 400;
/// IP MTU of the inner network.
const MTU: u32 = 9000;
/// Time limit for a connection over the loopback interface.
const PATIENCE: Duration = Duration::from_secs(10);

/// Compares RDMA writes through a TLS link with the same through a plain tunnel (VXLAN).
pub(super) fn tls_against_vxlan(runs: usize) -> Result<Figure> {
    let folder = tempfile::tempdir().context("no folder for keys")?;
    // As in the daemon, connections over TLS have no ICRC.
    let without_icrc = PortRules::default().with_negotiate(true).with_omit_icrc(true);
    let mut tls = Ends::new(tls(folder.path())?, &without_icrc)?;
    let mut plain = Ends::new(vxlan()?, &PortRules::default())?;
    let rounds = (0..runs).map(|_| Ok([tls.play()?, plain.play()?])).collect::<Result<Vec<_>>>()?;
    let title = "RDMA write of 1 MiB through a TLS link, loopback".to_owned();
    Ok(Figure::of_rounds("in-process/tls", title, "Gb/s", false, &rounds, "through a plain tunnel (VXLAN)"))
}

/// Both ends, with a connected queue pair each.
struct Ends([Station; 2]);

impl Ends {
    fn new(links: [Arc<dyn Link>; 2], rules: &PortRules) -> Result<Self> {
        let began = Instant::now();
        while links.iter().any(|link| link.inspect().up.taken() != Some(true)) {
            ensure!(began.elapsed() < PATIENCE, "the link does not come up");
            thread::yield_now();
        }
        let end = |(host, link): (u8, &Arc<dyn Link>)| {
            let link = (Arc::clone(link), rules.clone());
            Station::new(&Rxe::new(RxeConfig::default())?, host, link, (1, WRITE), MTU)
        };
        let [one, other] = &links;
        let (mut one, mut other) = (end((1, one))?, end((2, other))?);
        one.connect(&other.addresses().collect::<Vec<_>>())?;
        other.connect(&one.addresses().collect::<Vec<_>>())?;
        Ok(Self([one, other]))
    }

    /// Writes, and returns the received Gb/s.
    #[expect(clippy::cast_precision_loss, reason = "figures have three digits")]
    fn play(&mut self) -> Result<f64> {
        let [Station { side, qps, .. }, to] = &mut self.0;
        let qp = qps.first_mut().context("no queue pair")?;
        let local = [side.buffer.sge(&side.mr, 0, WRITE)];
        let write = [qp.encode(&SendWr::write(0, &local, to.side.buffer.va(), to.side.mr.rkey))];
        let began = Instant::now();
        let mut posted = 0;
        for done in 0..WRITES {
            while posted < WRITES.min(done + DEPTH) {
                ensure!(qp.post_encoded(&write, 1) == 1, "the send ring is full");
                posted += 1;
            }
            side.reap(1, |_| thread::sleep(Duration::from_micros(50)))?;
        }
        Ok(f64::from(WRITES) * (WRITE * 8) as f64 / began.elapsed().as_secs_f64() / 1e9)
    }
}

/// Returns both ends of a plain tunnel.
fn vxlan() -> Result<[Arc<dyn Link>; 2]> {
    let hosts = [1, 2].map(|host| Ipv4Addr::new(127, 0, 0, host));
    let port = UdpSocket::bind((hosts[0], 0))?.local_addr()?.port();
    let end = |local: Ipv4Addr, remote: Ipv4Addr| -> Result<Arc<dyn Link>> {
        let [local, remote] = [local, remote].map(|host| SocketAddr::new(IpAddr::V4(host), port));
        let config = VxlanConfig::new(local).with_remotes(vec![remote]);
        Ok(Arc::new(VxlanLink::bind(&config, Arc::new(MonotonicClock::default()))?))
    };
    Ok([end(hosts[0], hosts[1])?, end(hosts[1], hosts[0])?])
}

/// Returns both ends of a TLS link, with keys in a folder.
fn tls(folder: &Path) -> Result<[Arc<dyn Link>; 2]> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new(vec![Ipv4Addr::LOCALHOST.to_string()])?.signed_by(&key, &authority)?;
    let write = |name: &str, text: String| -> Result<PathBuf> {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    };
    let files = TlsFiles {
        certificate: write("certificate.pem", certificate.pem())?,
        key: write("key.pem", key.serialize_pem())?,
        authority: write("authority.pem", authority.pem())?,
    };
    let address = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?;
    let end = |role| -> Result<Arc<dyn Link>> {
        Ok(Arc::new(TlsLink::open(&TlsConfig::new(role, address).with_files(files.clone()))?))
    };
    Ok([end(TlsRole::Listen)?, end(TlsRole::Connect)?])
}

//! Builds the guest bed, boots guests with the device, and tests and measures it there.

mod agent;
mod bed;
mod process;
mod vm;

fn main() -> anyhow::Result<()> {
    env_logger::init();
    if std::env::args().nth(1).as_deref() == Some("agent") { return agent::serve(); }
    let bed = bed::Bed::build()?;
    let dir = tempfile::tempdir()?;
    let vm = vm::Vm::builder(&bed, dir.path()).name("a").boot()?;
    println!("{}", vm.run("uname -a; uptime; ls /; lsmod; dmesg | tail -5; df -h; free -m")?);
    let t = std::time::Instant::now();
    for _ in 0..20 { vm.run("true")?; }
    println!("{:?}", t.elapsed() / 20);
    let t = std::time::Instant::now();
    vm.reboot()?;
    println!("reboot {:?}", t.elapsed());
    println!("{}", vm.diagnosis());
    Ok(())
}

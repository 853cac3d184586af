//! Builds the guest bed, boots guests with the device, and tests and measures it there.

mod bed;
mod process;

fn main() -> anyhow::Result<()> {
    env_logger::init();
    let bed = bed::Bed::build()?;
    println!("{}", bed.qemu_version()?);
    Ok(())
}

//! Simulations.

use super::laid_out;
use super::shared::{count, positive};
use attlas_lab::simulate::{Model, Task};
use clap::{Args, Subcommand};
use std::path::PathBuf;

#[derive(Args, Clone, Debug)]
pub(crate) struct SimulateArgs {
    #[command(subcommand)]
    pub(crate) what: Simulation,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Simulation {
    /// Tokens as particles that attend to each other, with depth as time: clusters emerge, and the attention matrix
    /// tends to a low-rank matrix of zeros and ones.
    #[command(after_help = laid_out("Examples:\n  \
attlas simulate particles --seed 3 --svg particles.svg\n  \
attlas simulate particles --model rescaled --n 40 --d 80 --t-end 11\n  \
attlas simulate particles --model sphere --causal --t-end 30 --json\n  \
attlas simulate particles --value-matrix \"1,0;0,-1\" --svg planes.svg"))]
    Particles(ParticlesArgs),
    /// Find tokens that sum to zero with two others: one head of third-order attention can, one head of ordinary
    /// attention cannot.
    #[command(after_help = laid_out("Examples:\n  \
attlas simulate match3\n  \
attlas simulate match3 --task match2\n  \
attlas simulate match3 --n 32 --modulus 61 --count 100 --single --json"))]
    Match3(MatchArgs),
    /// Find the token at the end of a chain of repetitions: a few layers find it by pointer doubling, with any method
    /// for the lookups.
    #[command(after_help = laid_out("Examples:\n  \
attlas simulate khop --k 16\n  \
attlas simulate khop --n 1024 --k 16 --method anna --set weights=softmax\n  \
attlas simulate khop --method sink_window --set window=64 --json"))]
    Khop(KhopArgs),
}

#[derive(Args, Clone, Debug)]
pub(crate) struct KhopArgs {
    /// Tokens of a sequence.
    #[arg(long, default_value = "256", value_name = "N", value_parser = count)]
    pub(crate) n: usize,
    /// Hops.
    #[arg(long, default_value = "8", value_name = "K", value_parser = count)]
    pub(crate) k: usize,
    /// Different tokens.
    #[arg(long, default_value = "8", value_name = "N", value_parser = count)]
    pub(crate) vocabulary: usize,
    /// Sequences.
    #[arg(long, default_value = "20", value_name = "N", value_parser = count)]
    pub(crate) count: usize,
    /// Method for the lookups, by id.
    #[arg(long, default_value = "exact", value_name = "ID")]
    pub(crate) method: String,
    /// Set a parameter of that method; may be repeated.
    #[arg(long, value_name = "PARAM=VALUE")]
    pub(crate) set: Vec<String>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct ParticlesArgs {
    /// Space of the particles and motion of its frame.
    #[arg(long, value_enum, default_value_t = Model::Rescaled)]
    pub(crate) model: Model,
    /// Number of particles; by default 20, or 64 on the sphere.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) n: Option<usize>,
    /// Number of dimensions; by default 2, or 3 on the sphere.
    #[arg(long, value_name = "N", value_parser = count)]
    pub(crate) d: Option<usize>,
    /// Sharpness of attention on the sphere.
    #[arg(long, default_value_t = 1.0, value_name = "X", value_parser = positive)]
    pub(crate) beta: f64,
    /// Query matrix: rows joined by semicolons, such as "1,0;0,2", or a .npy file; the identity by default.
    #[arg(long, value_name = "M", allow_hyphen_values = true)]
    pub(crate) query_matrix: Option<String>,
    /// Key matrix, in the same form.
    #[arg(long, value_name = "M", allow_hyphen_values = true)]
    pub(crate) key_matrix: Option<String>,
    /// Value matrix, in the same form; with eigenvalues of both signs, rescaled particles end on hyperplanes.
    #[arg(long, value_name = "M", allow_hyphen_values = true)]
    pub(crate) value_matrix: Option<String>,
    /// Let a particle attend only to itself and to those before it.
    #[arg(long)]
    pub(crate) causal: bool,
    /// Duration; by default 6, on the sphere 15, for the free system 2.
    #[arg(long, value_name = "T", value_parser = positive)]
    pub(crate) t_end: Option<f64>,
    /// Duration of a step.
    #[arg(long, default_value_t = 0.05, value_name = "T", value_parser = positive)]
    pub(crate) dt: f64,
    /// Use first-order steps instead of fourth-order ones.
    #[arg(long)]
    pub(crate) euler: bool,
    /// Halve the step until the final state changes by less than 0.0001.
    #[arg(long)]
    pub(crate) refine: bool,
    /// Also write the paths as a picture: SVG, or PDF where the name ends in .pdf.
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct MatchArgs {
    /// Tokens of a sequence.
    #[arg(long, default_value = "16", value_name = "N", value_parser = count)]
    pub(crate) n: usize,
    /// The modulus; by default about half the tokens have a match.
    #[arg(long, value_name = "M")]
    pub(crate) modulus: Option<u64>,
    /// Sequences.
    #[arg(long, default_value = "500", value_name = "N", value_parser = count)]
    pub(crate) count: usize,
    /// Number of partners that complete a sum.
    #[arg(long, value_enum, default_value_t = Task::Match3)]
    pub(crate) task: Task,
    /// Use single instead of double precision.
    #[arg(long)]
    pub(crate) single: bool,
}

def k1(logprobs_RT, reference_RT): return logprobs_RT - reference_RT
def k3(logprobs_RT, reference_RT):
    u = reference_RT - logprobs_RT
    return u.exp() - u - 1
def none(logprobs_RT, reference_RT): return logprobs_RT * 0
KLS = {"none": none, "k1": k1, "k3": k3}
def constant(weight, version): return weight
SCHEDULES = {"constant": constant}

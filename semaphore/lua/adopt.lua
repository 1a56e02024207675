-- Puts the state that fetch.lua has taken away where the other keys are. If another batch has made a state there meanwhile, that keeps what it
-- has counted, and gets the higher fence and ticket and the newer limit.
--
-- KEYS      state, see apply.lua
-- ARGV      the fields of the hash
-- returns   nothing

local call, old = redis.call, {}
for i = 1, #ARGV, 2 do old[ARGV[i]] = ARGV[i + 1] end
local is = call('HMGET', KEYS[1], 'fence', 'ticket', 'permits', 'quiet')
if is[4] then return {} end
for i, field in ipairs({'fence', 'ticket'}) do
  if is[i] and old[field] and tonumber(is[i]) > tonumber(old[field]) then old[field] = is[i] end
end
if is[3] then
  local function version(text) return tonumber((text or ''):match('(%d+)$') or 0) end
  old = {fence = old.fence, ticket = old.ticket, permits = version(old.permits) > version(is[3]) and old.permits or is[3]}
end
for field, value in pairs(old) do call('HSET', KEYS[1], field, value) end
local t = call('TIME')
if old.lives then call('PEXPIRE', KEYS[1], string.format('%.0f', math.max(1, (old.lives - (t[1] * 1000000 + t[2])) / 1000))) end
return {}

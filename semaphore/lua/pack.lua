-- Puts the state of a semaphore into the field quiet of state, see apply.lua, while its slot moves: at the server that the slot leaves, keys can
-- be deleted but not made, and one key can be used wherever it is. Requests that wait are dropped. Their processes send them again, since
-- they find that the store does not know them (Report.Fresh).
--
-- KEYS      those of state, held and info that exist; the others of them are nowhere. Where queue, procs and idle are does not matter: apply.lua
--           deletes them when it reads the field.
-- returns   1, or nothing if the state cannot be in the field, or is there already; then nothing was changed

local keys = {}
for _, key in ipairs(KEYS) do keys[key:match('%l+$')] = key end
local struct, call = rawget(_G, 'struct'), redis.call
if not (struct and keys.state) then return {} end
local s = call('HMGET', keys.state, 'fence', 'ticket', 'seen', 'permits', 'lives', 'quiet', 'solo')
for i = 1, 5 do
  if not s[i] then return {} end
end
local limit, version = s[4]:match('^3 (%d+) (%d+)$')
if not limit or s[6] or s[7] then return {} end
local t = call('TIME')
local now, seen, lives = t[1] * 1000000 + t[2], tonumber(s[3]), tonumber(s[5])
if not (seen and lives) or seen - now > 2000000 then return {} end -- the clock was set back
now = math.max(now, seen)
if lives - now < 2 * 86400000000 then lives = now + 3 * 86400000000 end -- quiet.lua leaves the last day to apply.lua

local function plain(name) return not (name:find('\n', 1, true) or name:find('\0', 1, true)) end
local all = {}
if keys.held then all = call('ZRANGEBYSCORE', keys.held, string.format('(%.0f', now), '+inf', 'WITHSCORES', 'LIMIT', 0, 65) end
if #all > 128 then return {} end
local used, first, parts = 0, 0, {}
for i = 1, #all, 2 do
  local row = keys.info and call('HGET', keys.info, all[i])
  local n, number, since, label = (row or ''):match('^(%d+) %S+ (%d+) (%d+) (.*)$')
  if not n or not plain(all[i]) or not plain(label) then return {} end
  used = used + n
  if first == 0 then first = all[i + 1] end
  parts[#parts + 1] = '\nholder ' .. all[i] .. '\0' .. label .. '\0' .. struct.pack('<dddd', n, all[i + 1], number, since)
end
local text = struct.pack('<dddddddd', limit, version, lives, s[2], s[1], now, used, first) .. table.concat(parts)
if #text > 8192 then return {} end

for part, key in pairs(keys) do
  if part ~= 'state' then call('DEL', key) end
end
call('HDEL', keys.state, 'fence', 'ticket', 'used', 'seen', 'lives', 'busy', 'sift')
call('HSET', keys.state, 'quiet', text)
call('PEXPIRE', keys.state, string.format('%.0f', (lives - now) / 1000))
return {'1'}
